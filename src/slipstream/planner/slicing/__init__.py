"""Where to cut a sequence into token slices (TeraPipe, sections 3.3 and 3.4)."""
