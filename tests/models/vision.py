"""Image models in plain torch, with torchvision's shapes and parameter counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from tests.models.case import Case, images


class LeNet5(nn.Module):
    """Three convolutions and two linears on 32 x 32 grey images."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.feature_extractor = nn.Sequential(
            nn.Conv2d(1, 6, 5),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Conv2d(16, 120, 5),
            nn.Tanh(),
        )
        self.classifier = nn.Sequential(nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.classifier(torch.flatten(self.feature_extractor(x), 1))
        return F.softmax(logits, dim=1)

    @staticmethod
    def module_macs(batch: int) -> dict[str, int]:
        """MACs of each convolution and linear, and of what holds them."""
        macs = {
            "feature_extractor.0": batch * 6 * (28 * 28) * (1 * 5 * 5),
            "feature_extractor.3": batch * 16 * (10 * 10) * (6 * 5 * 5),
            "feature_extractor.6": batch * 120 * (1 * 1) * (16 * 5 * 5),
            "classifier.0": batch * 120 * 84,
            "classifier.2": batch * 84 * 10,
        }
        for parent in ("feature_extractor", "classifier"):
            macs[parent] = sum(n for name, n in macs.items() if name.startswith(parent + "."))
        macs[""] = macs["feature_extractor"] + macs["classifier"]
        return macs


class AlexNet(nn.Module):
    """Five convolutions and three linears on 224 x 224 images."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            *(nn.Dropout(), nn.Linear(256 * 6 * 6, 4096), nn.ReLU()),
            *(nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))
        return out

    @staticmethod
    def macs(batch: int) -> int:
        convolutions = (
            64 * 3 * 11**2 * 55**2
            + 192 * 64 * 5**2 * 27**2
            + (384 * 192 + 256 * 384 + 256 * 256) * 3**2 * 13**2
        )
        return batch * (convolutions + 9216 * 4096 + 4096**2 + 4096 * 1000)


def _conv(ins: int, outs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution without bias that keeps the size (over the stride), and its batch norm."""
    return nn.Sequential(
        nn.Conv2d(ins, outs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outs),
    )


class Residual(nn.Module):
    """Convolutions, with the input (or a 1x1 convolution of it) added to their output."""

    def __init__(self, convs: Sequence[nn.Module], shortcut: nn.Module | None) -> None:
        super().__init__()
        self.convs = nn.ModuleList(convs)
        self.shortcut = shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x
        for i, conv in enumerate(self.convs):
            out = conv(F.relu(out) if i else out)
        return F.relu(out + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nn.Module):
    """Stem, four stages of residual blocks, average, linear; expansion 1 (two 3x3) or 4."""

    WIDTHS, SIZES = (64, 128, 256, 512), (56, 28, 14, 7)

    def __init__(self, blocks: Sequence[int], expansion: int) -> None:
        super().__init__()
        self.conv1 = _conv(3, 64, 7, stride=2)
        ins, stages = 64, []
        for stage, (width, n) in enumerate(zip(self.WIDTHS, blocks, strict=True)):
            layers = []
            for i in range(n):
                stride = 2 if stage and not i else 1
                layers.append(_residual(ins, width, stride, expansion))
                ins = width * expansion
            stages.append(nn.Sequential(*layers))
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(ins, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 3, 2, 1)
        out: torch.Tensor = self.fc(self.stages(x).mean((2, 3)))
        return out

    STEM_MACS = 64 * 3 * 7**2 * 112**2

    @classmethod
    def basic_macs(cls) -> int:
        """ResNet-18: two blocks of two 3x3 convolutions in each stage."""
        macs = cls.STEM_MACS + 4 * (64 * 64 * 3**2) * 56**2 + 512 * 1000
        for width, size in zip(cls.WIDTHS[1:], cls.SIZES[1:], strict=True):
            before = width // 2
            macs += (before * width * 3**2 + 3 * width * width * 3**2) * size**2
            macs += before * width * size**2  # shortcut
        return macs

    @classmethod
    def bottleneck_macs(cls, blocks: Sequence[int]) -> int:
        """1x1 down, 3x3 (it holds the stride), 1x1 up by 4."""
        macs, ins, before = cls.STEM_MACS + 2048 * 1000, 64, 56
        for width, size, n in zip(cls.WIDTHS, cls.SIZES, blocks, strict=True):
            outs = 4 * width
            macs += ins * width * before**2 + ins * outs * size**2  # first 1x1, shortcut
            macs += (n - 1) * outs * width * size**2
            macs += n * (width * width * 3**2 + width * outs) * size**2
            ins, before = outs, size
        return macs


def _residual(ins: int, width: int, stride: int, expansion: int) -> Residual:
    outs = width * expansion
    shortcut = _conv(ins, outs, 1, stride) if stride > 1 or ins != outs else None
    if expansion == 1:
        return Residual([_conv(ins, width, 3, stride), _conv(width, width, 3)], shortcut)
    return Residual(
        [_conv(ins, width, 1), _conv(width, width, 3, stride), _conv(width, outs, 1)], shortcut
    )


class MobileNetV2(nn.Module):
    """Inverted residuals: 1x1 up, depthwise 3x3, 1x1 down."""

    # expansion, channels, blocks, stride of the first
    STAGES = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv(3, 32, 3, 2), nn.ReLU6()]
        ins = 32
        for expansion, outs, n, first in self.STAGES:
            for i in range(n):
                layers.append(InvertedResidual(ins, outs, expansion, 1 if i else first))
                ins = outs
        self.features = nn.Sequential(*layers, _conv(320, 1280, 1), nn.ReLU6())
        self.classifier = nn.Linear(1280, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.classifier(self.features(x).mean((2, 3)))
        return out

    @classmethod
    def macs(cls) -> int:
        size, ins = 112, 32
        macs = 32 * 3 * 3**2 * size**2
        for expansion, outs, n, first in cls.STAGES:
            for i in range(n):
                hidden, before = expansion * ins, size
                size = size if i else size // first
                macs += hidden * ins * before**2 if expansion > 1 else 0
                macs += hidden * 3**2 * size**2 + outs * hidden * size**2
                ins = outs
        return macs + 1280 * 320 * size**2 + 1280 * 1000


class InvertedResidual(nn.Module):
    """One block of MobileNetV2."""

    def __init__(self, ins: int, outs: int, expansion: int, stride: int) -> None:
        super().__init__()
        hidden = ins * expansion
        up = [_conv(ins, hidden, 1), nn.ReLU6()] if expansion > 1 else []
        depthwise = [_conv(hidden, hidden, 3, stride, groups=hidden), nn.ReLU6()]
        self.conv = nn.Sequential(*up, *depthwise, _conv(hidden, outs, 1))
        self.adds = stride == 1 and ins == outs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.conv(x)
        return x + out if self.adds else out


class ViT(nn.Module):
    """Patches, a class token, encoder layers that norm first, a linear head."""

    def __init__(self, size: int, patch: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(self.norm(x)[:, 0])
        return out

    @staticmethod
    def macs(size: int, patch: int, d: int, depth: int) -> int:
        patches = (size // patch) ** 2
        s = patches + 1
        layer = 4 * d * d * s + 2 * s * s * d + 2 * d * (4 * d) * s
        return (3 * patch * patch) * d * patches + depth * layer + d * 1000


class UNet(nn.Module):
    """Down once, up once by a transposed convolution, joined with the skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, padding=1)
        self.middle = nn.Conv2d(8, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.join = nn.Conv2d(8 + 8, 8, 3, padding=1)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = F.relu(self.down(x))
        x = F.relu(self.middle(F.max_pool2d(skip, 2)))
        x = F.relu(self.join(torch.cat([self.up(x), skip], 1)))
        out: torch.Tensor = self.head(x)
        return out

    @staticmethod
    def module_macs(batch: int, height: int, width: int) -> dict[str, int]:
        """The transposed convolution is counted by its input, half the size."""
        area, quarter = height * width, (height // 2) * (width // 2)
        macs = {
            "down": batch * 8 * (3 * 3 * 3) * area,
            "middle": batch * 16 * (8 * 3 * 3) * quarter,
            "up": batch * 16 * (8 * 2 * 2) * quarter,
            "join": batch * 8 * (16 * 3 * 3) * area,
            "head": batch * 2 * 8 * area,
        }
        return {**macs, "": sum(macs.values())}


_LENET = LeNet5.module_macs(1024)
_UNET = UNet.module_macs(2, 10, 14)

CASES = (
    Case(
        name="LeNet5",
        make=LeNet5,
        inputs=images(1024, 1, 32),
        macs=_LENET[""],
        params=(6 * 25 + 6)
        + (16 * 6 * 25 + 16)
        + (120 * 16 * 25 + 120)
        + (120 * 84 + 84)
        + (84 * 10 + 10),
        gradient_macs=2 * _LENET[""] - _LENET["feature_extractor.0"],
        modules=_LENET,
        runs_for_real=True,
    ),
    Case(
        name="AlexNet",
        make=AlexNet,
        inputs=images(4, 3, 224),
        macs=AlexNet.macs(4),
        params=61_100_840,
        gradient_macs=2 * AlexNet.macs(4) - 4 * 64 * 3 * 11**2 * 55**2,
    ),
    Case(
        name="ResNet-18",
        make=lambda: ResNet((2, 2, 2, 2), 1),
        inputs=images(1, 3, 224),
        macs=ResNet.basic_macs(),
        params=11_689_512,
        gradient_macs=2 * ResNet.basic_macs() - ResNet.STEM_MACS,
        modules={"conv1": ResNet.STEM_MACS, "fc": 512 * 1000},
        runs_for_real=True,
    ),
    Case(
        name="ResNet-50",
        make=lambda: ResNet((3, 4, 6, 3), 4),
        inputs=images(1, 3, 224),
        macs=ResNet.bottleneck_macs((3, 4, 6, 3)),
        params=25_557_032,
        gradient_macs=2 * ResNet.bottleneck_macs((3, 4, 6, 3)) - ResNet.STEM_MACS,
    ),
    Case(
        name="MobileNetV2",
        make=MobileNetV2,
        inputs=images(1, 3, 224),
        macs=MobileNetV2.macs(),
        params=3_504_872,
        gradient_macs=2 * MobileNetV2.macs() - 32 * 3 * 3**2 * 112**2,
    ),
    Case(
        name="ViT-B/16",
        make=lambda: ViT(224, 16, 768, 12, 12),
        inputs=images(1, 3, 224),
        macs=ViT.macs(224, 16, 768, 12),
        params=86_567_656,
        gradient_macs=2 * ViT.macs(224, 16, 768, 12) - 768 * 768 * 196,
        recomputed_macs=12 * 197 * 197 * 768,  # 196 patches and the class token
    ),
    Case(
        name="U-Net",
        make=UNet,
        inputs=images(2, 3, 10, 14),
        macs=_UNET[""],
        params=(8 * 27 + 8) + (16 * 72 + 16) + (16 * 8 * 4 + 8) + (8 * 144 + 8) + (2 * 8 + 2),
        gradient_macs=2 * _UNET[""] - _UNET["down"],
        modules=_UNET,
        runs_for_real=True,
    ),
)
