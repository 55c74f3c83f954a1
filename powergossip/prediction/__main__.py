from powergossip.prediction.command_line import command

command()
