"""Tests of the learner and the trainer."""
