"""Random faults in the training of a split model, and an oracle for its numbers, errors and checkpoints."""
