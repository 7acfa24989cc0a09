"""The compiled core: C++ sources (``csrc``), their build, and the loading of the result.

May import ``environment`` alone. Begin with ``build``; ``recipe`` says what is compiled and how.
"""
