"""Classifiers with a policy's backbone."""

from __future__ import annotations

import copy

import pytest
import torch

from oncurve.models.heads.classifier import build_classifier, classify
from oncurve.models.policy import Policy
from tests.models.test_every_family import CharacterTokenizer
from tests.models.tiny_families import tiny_model


class Tokenizer(CharacterTokenizer):
    pad_token_id = 0


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom"])
def test_a_classifier_has_the_backbone_of_the_policy_whatever_attention_it_supports(family: str) -> None:
    """Gemma 2 and BLOOM have no scaled_dot_product_attention in transformers."""
    model = tiny_model(family)
    own = copy.deepcopy(model)
    classifier = build_classifier(Policy(model, Tokenizer()), ("reward",), 0, by_token=False)
    rows = [[5, 6, 7, 8, 9], [7, 8]]
    with torch.no_grad():
        hidden = [own.base_model(torch.tensor([row])).last_hidden_state[0, -1] for row in rows]
        head = next(
            module for module in classifier.modules() if isinstance(module, torch.nn.Linear) and module.out_features == 1
        )
        expected = torch.stack([head(each) for each in hidden])
        assert torch.allclose(classify(classifier, rows), expected, atol=1e-5)
