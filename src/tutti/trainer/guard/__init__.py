"""What a training run checks of itself, at its first step and every so often.

step_guard.py       which check comes when; what it finds is an error or a warning
rank_agreement.py   ranks have the same data order, samples, hyperparameters and weights
loss_coupling.py    the loss is a mean over samples, so that it does not depend on how many ranks share them
evaluation_dropout.py   dropout is off in the first evaluation

state_check.py, beside this package, compares the state that forward writes.
"""
