"""The user's settings of model parallelism, from their sources to what the other folders read.

Begin with ``config``: all settings, and which of them exclude each other. ``sources`` reads them from the
script, the launcher and the command line. Imports only the defaults of ``planning``; all of modelparallel may
import this.
"""
