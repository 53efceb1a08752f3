"""Extras beside training: a Trainer for transformers, run pages, first configurations, the doctor, encoders."""
