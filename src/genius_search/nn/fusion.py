"""Fusion of image and text features into one unit embedding (paper, section 4.2.1)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from genius_search.config import FusionConfig


class Fusion(nn.Module):
    """Fuses features: h(x, y) = λ·text + (1−λ)·image + MLP([text; image]), then L2-normalised.

    λ is the output of an MLP with a sigmoid. An absent modality is a zero vector, of which the projection
    passes on only its bias; this is how the network recognises absence. Layer names follow the released
    checkpoint (specification, section 7).
    """

    def __init__(self, dim: int, config: FusionConfig) -> None:
        super().__init__()
        joint = 2 * config.hidden
        self.text_projection_layer = nn.Linear(dim, config.hidden)
        self.image_projection_layer = nn.Linear(dim, config.hidden)
        self.combiner_layer = nn.Linear(joint, joint)
        self.output_layer = nn.Linear(joint, dim)
        self.dynamic_scalar = nn.Sequential(
            nn.Linear(joint, joint), nn.ReLU(), nn.Identity(), nn.Linear(joint, 1), nn.Sigmoid()
        )
        self.dropout = nn.Dropout(config.dropout)
        if config.start == "sum":
            nn.init.zeros_(self.output_layer.weight)
            nn.init.zeros_(self.output_layer.bias)

    def forward(
        self, image: Float[Tensor, "items dim"], text: Float[Tensor, "items dim"]
    ) -> Float[Tensor, "items dim"]:
        """Return unit embeddings. Rows of an absent modality must be zero."""
        joint = torch.cat(
            [
                torch.relu(self.text_projection_layer(self.dropout(text))),
                torch.relu(self.image_projection_layer(self.dropout(image))),
            ],
            dim=-1,
        )
        joint = self.dropout(joint)
        mixed = self.output_layer(self.dropout(torch.relu(self.combiner_layer(joint))))
        text_share = self.dynamic_scalar(joint)
        fused = mixed + text_share * text + (1 - text_share) * image
        return nn.functional.normalize(fused.float(), dim=-1)
