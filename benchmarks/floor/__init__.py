"""The machine's own limits, measured by a program that uses neither torch nor this project."""
