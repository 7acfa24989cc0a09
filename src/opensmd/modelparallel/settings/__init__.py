"""What a user can set about model parallelism, from where it is given to what the other folders read.

Begin with ``config``, all settings and which of them exclude each other; ``sources`` reads them from the
script, the launcher and the command line. Imports of ``planning`` the defaults; all of modelparallel may
import this.
"""
