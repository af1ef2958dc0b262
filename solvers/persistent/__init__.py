"""Dynamic programming over segments, as Rockmate and rotor do it."""
