"""`ppfleet launch`: start a training script on one machine or on several."""
