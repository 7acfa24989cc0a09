"""Random faults in collectives, and an oracle for what every surviving rank must see."""
