"""A call on its way: arrays find their backend, a checked problem becomes one executable, which is kept."""
