"""The compiled core: C++ sources (``csrc``), their build, and loading the result.

May import only ``environment``. Begin with ``build``; ``recipe`` says what is compiled and how.
"""
