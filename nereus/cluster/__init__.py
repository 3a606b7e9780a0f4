"""A cluster on one machine: `config` says what it is made of, `up` starts it, `mend` starts again what has died, `down`
ends it, `state` remembers it."""
