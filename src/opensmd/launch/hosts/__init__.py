"""Starting smdrun on several hosts over ssh with one command, and ending all that it has started.

Begin with ``driver`` (here) and ``member`` (what ssh starts on each host). ``host_list`` and ``order`` are
pure. Imports ``environment`` and the launcher's files around this folder.
"""
