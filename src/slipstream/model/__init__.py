"""A model and its stages: Hugging Face causal LMs split over ranks and sliced over tokens, their code untouched."""
