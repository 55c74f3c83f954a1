from powergossip.runs.compare.command_line import command

command()
