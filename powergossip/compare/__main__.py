from powergossip.compare.command_line import command

command()
