"""Kinds of depth cells, by their names in rows."""

LADDER, WALK, FEW, WHOLE_WINDOW = "", "walk", "few", "swa_full"
