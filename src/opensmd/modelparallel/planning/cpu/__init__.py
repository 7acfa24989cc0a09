"""What operations take on one core of a CPU. Pure: shapes go in, seconds come out.

Begin with ``rates``, the table; ``kinds`` says what of it an operation is, and ``cost`` adds up. Imports no
other folder.
"""
