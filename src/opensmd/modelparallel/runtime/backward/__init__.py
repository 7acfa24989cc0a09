"""What a backward begins with, when it runs, and gradients of weights that are computed apart."""
