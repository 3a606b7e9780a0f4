"""What all stage services share: a table of units, each a set of worker processes behind one lifecycle."""
