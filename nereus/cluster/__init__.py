"""A cluster on one machine: `config` says what it is made of, `up` starts it, `down` ends it, `state` remembers it."""
