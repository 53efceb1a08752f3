"""schedule="auto" and slices="auto": measures the first steps and chooses from them."""
