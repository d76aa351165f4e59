"""Methods that can be trained: one learner for each."""
