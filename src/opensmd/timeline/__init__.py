"""What every rank of a job did when, as a trace and a page, without any code in the script.

Imports only ``environment``; ``collectives`` and ``modelparallel`` pass in what they record. ``recorder``
writes one file per rank while the job runs, ``files`` reads them all, ``shares`` sums up, ``trace`` and
``page`` write the results. Begin with ``recorder``.
"""
