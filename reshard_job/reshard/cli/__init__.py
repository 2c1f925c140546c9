"""The command line: options, commands, output, progress, and the reports for people.

Imports everything else; nothing imports it but `reshard.owner`.
"""
