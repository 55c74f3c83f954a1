"""How train.py trains: settings, local optimizers, evaluation."""
