"""Models of other people for the memory benchmark, with random weights: transformers, timm, torchvision, plain torch.

Each is a function of the batch size, as ``ampwise memory`` takes it. ``SEEN`` were looked at while the prediction was
developed; ``UNSEEN`` were drawn by lot before anything was measured, and measured once, when it was finished.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[Any, ...], Callable[..., Tensor]]
Maker = Callable[..., Made]
TOKENS = 512
CLASSES = 1000


def tokens(batch: int, length: int, words: int) -> Tensor:
    return torch.randint(words, (batch, length))


def text_model(model_name: str, config_name: str, *, words: int = 32_000, length: int = TOKENS, **sizes: Any) -> Maker:
    """A language model of transformers: next or same tokens, by its own loss."""

    def make(batch: int = 2) -> Made:
        import transformers

        config = getattr(transformers, config_name)(vocab_size=words, **sizes)
        model = getattr(transformers, model_name)(config).train()
        return (
            model,
            (tokens(batch, length, words),),
            lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss,
        )

    return make


def masked_text(model_name: str, config_name: str, *, words: int = 30_000, length: int = TOKENS, **sizes: Any) -> Maker:
    """An encoder whose batch is padded."""

    def make(batch: int = 2) -> Made:
        import transformers

        config = getattr(transformers, config_name)(vocab_size=words, **sizes)
        model = getattr(transformers, model_name)(config).train()
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[:, length // 2 :] = 0
        return (
            model,
            (tokens(batch, length, words), mask),
            lambda ids, mask: model(input_ids=ids, attention_mask=mask, labels=ids).loss,
        )

    return make


def translator(model_name: str, config_name: str, *, words: int = 32_000, length: int = TOKENS, **sizes: Any) -> Maker:
    """An encoder and a decoder, by its own loss."""

    def make(batch: int = 2) -> Made:
        import transformers

        config = getattr(transformers, config_name)(vocab_size=words, **sizes)
        model = getattr(transformers, model_name)(config).train()
        batched = tokens(batch, length, words), tokens(batch, length // 2, words)
        return model, batched, lambda ids, labels: model(input_ids=ids, labels=labels).loss

    return make


def images(build: Callable[[], nn.Module], *, side: int = 224, dims: int = 2, classes: int = CLASSES) -> Maker:
    """A classifier of images, or of videos."""

    def make(batch: int = 2) -> Made:
        model = build().train()
        shape = (batch, 3, side, side) if dims == 2 else (batch, 3, 16, side, side)
        return (
            model,
            (torch.randn(shape), torch.randint(classes, (batch,))),
            lambda x, y: F.cross_entropy(model(x), y),
        )

    return make


def timm_model(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm  # type: ignore[import-not-found]

        return timm.create_model(name, pretrained=False, **options)  # type: ignore[no-any-return]

    return build


def vision_model(path: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision  # type: ignore[import-not-found]

        part, _, name = path.rpartition(".")
        module = getattr(torchvision.models, part) if part else torchvision.models
        return getattr(module, name)(weights=None, **options)  # type: ignore[no-any-return]

    return build


# --- models of transformers with inputs of their own ----------------------------------------------------------------


def whisper(batch: int = 2) -> Made:
    import transformers

    config = transformers.WhisperConfig(
        d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8, decoder_attention_heads=8
    )
    model = transformers.WhisperForConditionalGeneration(config).train()
    sounds, labels = torch.randn(batch, config.num_mel_bins, 3000), tokens(batch, 224, 50_000)
    return model, (sounds, labels), lambda x, y: model(input_features=x, labels=y).loss


def wav2vec2(batch: int = 2) -> Made:
    import transformers

    config = transformers.Wav2Vec2Config(mask_time_prob=0.0, layerdrop=0.0)
    model = transformers.Wav2Vec2Model(config).train()
    return model, (torch.randn(batch, 160_000),), lambda x: model(x).last_hidden_state.float().pow(2).mean()


def clip(batch: int = 2) -> Made:
    import transformers

    model = transformers.CLIPModel(transformers.CLIPConfig()).train()
    batched = tokens(batch, 77, 49_000), torch.randn(batch, 3, 224, 224)
    return model, batched, lambda ids, x: model(input_ids=ids, pixel_values=x, return_loss=True).loss


def segformer(batch: int = 2) -> Made:
    import transformers

    sizes: Any = {"hidden_sizes": [64, 128, 320, 512], "num_labels": 150}
    config = transformers.SegformerConfig(**sizes)
    model = transformers.SegformerForSemanticSegmentation(config).train()
    batched = torch.randn(batch, 3, 512, 512), torch.randint(150, (batch, 512, 512))
    return model, batched, lambda x, y: model(pixel_values=x, labels=y).loss


def deeplab(batch: int = 2) -> Made:
    import torchvision

    model = torchvision.models.segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None).train()
    batched = torch.randn(batch, 3, 384, 384), torch.randint(21, (batch, 384, 384))
    return model, batched, lambda x, y: F.cross_entropy(model(x)["out"], y)


# --- plain modules --------------------------------------------------------------------------------------------------


class LanguageLstm(nn.Module):
    def __init__(self, words: int = 20_000, width: int = 1024) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, 3, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.lstm(self.embedding(ids))[0]).flatten(0, 1), labels.flatten())


def lstm(batch: int = 2) -> Made:
    model = LanguageLstm()
    return model, (tokens(batch, 256, 20_000), tokens(batch, 256, 20_000)), model


class SpeechGru(nn.Module):
    """Convolutions over a spectrogram, GRUs both ways, CTC."""

    def __init__(self, width: int = 768, symbols: int = 32) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 32, (11, 41), (2, 2), (5, 20)),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20),
            nn.Conv2d(32, 32, (11, 21), (1, 2), (5, 10)),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20),
        )
        self.gru = nn.GRU(32 * 40, width, 4, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * width, symbols)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        features = self.convolutions(x).transpose(1, 2).flatten(2)
        scores = self.head(self.gru(features)[0]).float().log_softmax(-1)
        return F.cross_entropy(scores.flatten(0, 1), y.flatten())


def speech_gru(batch: int = 2) -> Made:
    model = SpeechGru()
    return model, (torch.randn(batch, 1, 800, 160), torch.randint(32, (batch, 400))), model


class ResBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.time = nn.Linear(time, outputs)
        self.second = nn.Sequential(nn.GroupNorm(32, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1))
        self.around = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.around(x) + self.second(self.first(x) + self.time(t)[:, :, None, None])  # type: ignore[no-any-return]


class PixelAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.GroupNorm(32, width), nn.MultiheadAttention(width, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).flatten(2).transpose(1, 2)
        return x + self.attention(y, y, y, need_weights=False)[0].transpose(1, 2).reshape(x.shape)  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Predicts the noise in images of 64 × 64."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        time, widths = 4 * width, (width, 2 * width, 2 * width, 4 * width)
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.inlet = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.up, self.shrink, self.grow = (nn.ModuleList() for _ in range(4))
        inputs = width
        for outputs in widths:
            self.down.append(ResBlock(inputs, outputs, time))
            self.shrink.append(nn.Conv2d(outputs, outputs, 3, 2, 1))
            inputs = outputs
        self.middle, self.attention = ResBlock(inputs, inputs, time), PixelAttention(inputs)
        for outputs in reversed(widths):
            self.grow.append(nn.ConvTranspose2d(inputs, inputs, 4, 2, 1))
            self.up.append(ResBlock(inputs + outputs, outputs, time))
            inputs = outputs
        self.outlet = nn.Sequential(nn.GroupNorm(32, inputs), nn.SiLU(), nn.Conv2d(inputs, 3, 3, padding=1))
        self.width = width

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        waves = torch.exp(-math.log(10_000) * torch.arange(self.width // 2, device=x.device) / (self.width // 2))
        angles = t[:, None] * waves
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        x, kept = self.inlet(x), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            kept.append(x := block(x, time))
            x = shrink(x)
        x = self.attention(self.middle(x, time))
        for block, grow in zip(self.up, self.grow, strict=True):
            x = block(torch.cat([grow(x), kept.pop()], 1), time)
        return self.outlet(x)  # type: ignore[no-any-return]


def unet(batch: int = 2) -> Made:
    model = UNet()
    batched = torch.randn(batch, 3, 64, 64), torch.rand(batch), torch.randn(batch, 3, 64, 64)
    return model, batched, lambda x, t, noise: F.mse_loss(model(x, t), noise)


class Translator(nn.Module):
    def __init__(self, words: int = 16_000, width: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.transformer = nn.Transformer(width, 8, 6, 6, 2048, 0.1, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        padded = source == 0
        made = self.transformer(
            self.embedding(source),
            self.embedding(target),
            tgt_mask=mask,
            src_key_padding_mask=padded,
            memory_key_padding_mask=padded,
        )
        return F.cross_entropy(self.head(made).flatten(0, 1), target.flatten())


def nn_transformer(batch: int = 2) -> Made:
    model = Translator()
    return model, (tokens(batch, TOKENS, 16_000), tokens(batch, TOKENS, 16_000)), model


class EncoderClassifier(nn.Module):
    def __init__(self, width: int = 768) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 12, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.embedding, self.encoder = nn.Embedding(30_000, width), nn.TransformerEncoder(layer, 8)
        self.head = nn.Linear(width, 10)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.encoder(self.embedding(ids)).mean(1)), labels)


def nn_encoder(batch: int = 2) -> Made:
    model = EncoderClassifier()
    return model, (tokens(batch, TOKENS, 30_000), torch.randint(10, (batch,))), model


class Clicks(nn.Module):
    """Embeddings of many categories, their products, an MLP, as recommenders have them."""

    rows: Tensor
    columns: Tensor

    def __init__(self, fields: int = 26, words: int = 40_000, width: int = 64) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.EmbeddingBag(words, width, mode="sum") for _ in range(fields))
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        pairs = (fields + 1) * fields // 2
        self.top = nn.Sequential(nn.Linear(pairs + width, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU())
        self.head = nn.Linear(512, 1)
        rows, columns = torch.tril_indices(fields + 1, fields + 1, -1)
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)

    def forward(self, numbers: Tensor, ids: Tensor, clicked: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        every = torch.stack([dense, *(each(ids[:, i : i + 1]) for i, each in enumerate(self.embeddings))], 1)
        products = torch.bmm(every, every.transpose(1, 2))[:, self.rows, self.columns]
        return F.binary_cross_entropy_with_logits(
            self.head(self.top(torch.cat([dense, products], 1))).squeeze(1), clicked
        )


def clicks(batch: int = 2) -> Made:
    model = Clicks()
    batched = torch.randn(batch, 13), torch.randint(40_000, (batch, 26)), torch.rand(batch)
    return model, batched, model


class Summarizer(nn.Module):
    """An LSTM both ways reads, one with attention writes."""

    def __init__(self, words: int = 16_000, width: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.reader = nn.LSTM(width, width, 2, bidirectional=True, batch_first=True)
        self.writer = nn.LSTM(width, 2 * width, 2, batch_first=True)
        self.attention = nn.MultiheadAttention(2 * width, 8, batch_first=True)
        self.head = nn.Linear(4 * width, words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        read, _ = self.reader(self.embedding(source))
        written, _ = self.writer(self.embedding(target))
        found, _ = self.attention(written, read, read)
        return F.cross_entropy(self.head(torch.cat([written, found], -1)).flatten(0, 1), target.flatten())


def summarizer(batch: int = 2) -> Made:
    model = Summarizer()
    return model, (tokens(batch, TOKENS, 16_000), tokens(batch, 128, 16_000)), model


class WaveVae(nn.Module):
    """Convolutions of sound, one dimension, dilated, with gates."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.inlet = nn.Conv1d(1, width, 16, 4, 6)
        self.gates = nn.ModuleList(nn.Conv1d(width, 2 * width, 3, padding=2**i, dilation=2**i) for i in range(9))
        self.mixes = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(9))
        self.latent = nn.Conv1d(width, 2 * 64, 1)
        self.outlet = nn.Sequential(
            nn.ConvTranspose1d(64, width, 16, 4, 6), nn.LeakyReLU(0.2), nn.Conv1d(width, 1, 7, padding=3), nn.Tanh()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.inlet(x)
        for gate, mix in zip(self.gates, self.mixes, strict=True):
            y = y + mix(F.glu(gate(y), 1))
        mean, spread = self.latent(y).chunk(2, 1)
        made = self.outlet(mean + torch.randn_like(mean) * spread.exp())
        return F.l1_loss(made, x) + (mean.pow(2) + spread.exp() - spread).mean()  # type: ignore[no-any-return]


def wave_vae(batch: int = 2) -> Made:
    model = WaveVae()
    return model, (torch.randn(batch, 1, 64_000),), model


# --- all of them ----------------------------------------------------------------------------------------------------

SMALL = {"num_hidden_layers": 8, "hidden_size": 1024, "num_attention_heads": 16}
GROUPED = SMALL | {"intermediate_size": 2816, "num_key_value_heads": 4}
# Families that the project had measured before, or whose errors were known, and two batch sizes of each.
KNOWN: dict[str, tuple[Maker, tuple[int, int]]] = {
    "GPT-2 (transformers)": (text_model("GPT2LMHeadModel", "GPT2Config", words=50_257, length=1024), (2, 8)),
    "Llama with GQA (transformers)": (text_model("LlamaForCausalLM", "LlamaConfig", **GROUPED), (2, 8)),
    "T5 (transformers)": (
        translator("T5ForConditionalGeneration", "T5Config", d_model=512, decoder_start_token_id=0),
        (2, 8),
    ),
    "BERT, padded (transformers)": (masked_text("BertForMaskedLM", "BertConfig"), (2, 8)),
    "ViT-B (timm)": (images(timm_model("vit_base_patch16_224")), (8, 32)),
    "ConvNeXt-T (timm)": (images(timm_model("convnext_tiny")), (8, 32)),
    "EfficientNet-B3 (timm)": (images(timm_model("efficientnet_b3"), side=288), (8, 32)),
    "Swin-T (timm)": (images(timm_model("swin_tiny_patch4_window7_224")), (8, 32)),
    "ResNet-50 (torchvision)": (images(vision_model("resnet50")), (8, 32)),
    "UNet (nn)": (unet, (4, 16)),
    "LSTM language model (nn)": (lstm, (8, 32)),
    "TransformerEncoder (nn)": (nn_encoder, (2, 8)),
}
OTHERS: dict[str, tuple[Maker, tuple[int, int]]] = {
    "Qwen3 (transformers)": (text_model("Qwen3ForCausalLM", "Qwen3Config", head_dim=128, **GROUPED), (2, 8)),
    "Gemma 2 (transformers)": (text_model("Gemma2ForCausalLM", "Gemma2Config", head_dim=256, **GROUPED), (2, 8)),
    "GPT-NeoX (transformers)": (
        text_model("GPTNeoXForCausalLM", "GPTNeoXConfig", intermediate_size=4096, **SMALL),
        (2, 8),
    ),
    "BLOOM (transformers)": (
        text_model("BloomForCausalLM", "BloomConfig", n_layer=8, hidden_size=1024, n_head=16),
        (2, 8),
    ),
    "BART (transformers)": (translator("BartForConditionalGeneration", "BartConfig", d_model=512), (2, 8)),
    "DeBERTa-v2 (transformers)": (
        masked_text(
            "DebertaV2ForMaskedLM",
            "DebertaV2Config",
            num_hidden_layers=8,
            hidden_size=768,
            num_attention_heads=12,
            intermediate_size=3072,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
        ),
        (2, 8),
    ),
    "Whisper (transformers)": (whisper, (2, 8)),
    "wav2vec 2.0 (transformers)": (wav2vec2, (2, 8)),
    "CLIP (transformers)": (clip, (8, 32)),
    "SegFormer (transformers)": (segformer, (2, 8)),
    "MaxViT-T (timm)": (images(timm_model("maxvit_tiny_tf_224")), (4, 16)),
    "BEiT-B (timm)": (images(timm_model("beit_base_patch16_224")), (8, 32)),
    "Mixer-B (timm)": (images(timm_model("mixer_b16_224")), (8, 32)),
    "RegNetY-3.2GF (timm)": (images(timm_model("regnety_032")), (8, 32)),
    "DenseNet-121 (torchvision)": (images(vision_model("densenet121")), (8, 32)),
    "MobileNetV3-L (torchvision)": (images(vision_model("mobilenet_v3_large")), (16, 64)),
    "DeepLabV3 (torchvision)": (deeplab, (2, 8)),
    "R3D-18 (torchvision)": (images(vision_model("video.r3d_18"), side=112, dims=3, classes=400), (2, 8)),
    "VGG-16 (torchvision)": (images(vision_model("vgg16")), (8, 32)),
    "Conv and GRU speech (nn)": (speech_gru, (4, 16)),
    "nn.Transformer, masked (nn)": (nn_transformer, (2, 8)),
    "Recommender (nn)": (clicks, (2048, 16384)),
    "LSTM summarizer (nn)": (summarizer, (8, 32)),
    "Sound VAE, Conv1d (nn)": (wave_vae, (2, 8)),
}
LOT = 35
_drawn = sorted(OTHERS)
random.Random(LOT).shuffle(_drawn)
UNSEEN = {name: OTHERS[name] for name in sorted(_drawn[:16])}
SEEN = KNOWN | {name: OTHERS[name] for name in sorted(_drawn[16:])}
