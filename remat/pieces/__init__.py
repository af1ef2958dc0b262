"""Steps that are cut into pieces, by graph breaks or by `blocks=`, under one budget."""
