"""The learner: graded groups in, an updated policy out."""
