"""The path of a call: arrays select their backend, and a checked problem becomes one cached executable."""
