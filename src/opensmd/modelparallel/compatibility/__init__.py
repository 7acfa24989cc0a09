"""Names of later versions of the interface, and habits of torch's functions that scripts rely on.

Begin with ``quirks``, the one place for habits of other libraries. Imports ``redirection`` and no other
folder of modelparallel.
"""
