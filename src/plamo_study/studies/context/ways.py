"""The ways of depth cells, by the names that rows have."""

LADDER, WALK, FEW, WHOLE_WINDOW = "", "walk", "few", "swa_full"
