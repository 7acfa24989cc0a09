"""What every rank of a job did when, as a trace and a page: without a line of code in the script.

Imports ``environment`` alone; ``collectives`` and ``modelparallel`` hand over what they record. ``recorder``
writes a file a rank while the job runs, ``files`` reads them all, ``shares`` counts, ``trace`` and ``page``
write the results. Begin with ``recorder``.
"""
