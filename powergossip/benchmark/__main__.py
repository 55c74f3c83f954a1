from powergossip.benchmark.command_line import command

command()
