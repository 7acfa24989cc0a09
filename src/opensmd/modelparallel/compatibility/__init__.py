"""Names of later versions of the interface, and habits of torch's functions that scripts rely on."""
