"""Which microbatch of a rank runs now, in which thread, and the record of it."""
