"""Recurrent and one-dimensional convolutional models of sequences."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.case import add

VOCABULARY = 5000


class LanguageModel(nn.Module):
    """Embedding, stacked LSTM with dropout, vocabulary head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 256)
        self.lstm = nn.LSTM(256, 384, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(384, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token."""
        hidden, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.head(hidden)
        return logits


class TextClassifier(nn.Module):
    """Embedding, bidirectional GRU, pooled over time."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 128, padding_idx=0)
        self.gru = nn.GRU(128, 256, 2, bidirectional=True, batch_first=True, dropout=0.1)
        self.head = nn.Linear(512, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        """Class logits."""
        hidden, _ = self.gru(self.embedding(tokens))
        logits: Tensor = self.head(hidden.max(1).values)
        return logits


class SeriesForecaster(nn.Module):
    """Plain recurrent network over many time series."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(64, 512, 2)
        self.head = nn.Linear(512, 64)

    def forward(self, series: Tensor) -> Tensor:
        """The next value at every step."""
        hidden, _ = self.rnn(series)
        forecast: Tensor = self.head(hidden)
        return forecast


class CellTagger(nn.Module):
    """An LSTM cell unrolled in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 256)
        self.cell = nn.LSTMCell(256, 512)
        self.head = nn.Linear(512, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tag logits at every step."""
        inputs = self.embedding(tokens)
        state = None
        outputs = []
        for step in range(inputs.shape[1]):
            state = self.cell(inputs[:, step], state)
            outputs.append(state[0])
        logits: Tensor = self.head(torch.stack(outputs, 1))
        return logits


class SpeechRecogniser(nn.Module):
    """Convolutional front end, bidirectional LSTM, characters for CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(80, 256, 5, 2, 2), nn.BatchNorm1d(256), nn.Hardtanh(0, 20, inplace=True))
        self.lstm = nn.LSTM(256, 256, 2, bidirectional=True)
        self.head = nn.Linear(512, 29)

    def forward(self, features: Tensor) -> Tensor:
        """Log probabilities, (time, batch, characters)."""
        hidden, _ = self.lstm(self.front(features).permute(2, 0, 1))
        return F.log_softmax(self.head(hidden), -1)


class GatedLayer(nn.Module):
    """A dilated causal convolution with a gate, a residual and a skip, as in WaveNet."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.pad = dilation
        self.gates = nn.Conv1d(channels, 2 * channels, 2, dilation=dilation)
        self.mix = nn.Conv1d(channels, 2 * channels, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The next residual and this layer's skip."""
        signal, gate = self.gates(F.pad(x, (self.pad, 0))).chunk(2, 1)
        residual, skip = self.mix(torch.tanh(signal) * torch.sigmoid(gate)).chunk(2, 1)
        return x + residual, skip


class WaveNet(nn.Module):
    """A small WaveNet over quantised sound."""

    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, channels)
        self.layers = nn.ModuleList(GatedLayer(channels, 2 ** (i % 6)) for i in range(12))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(channels, 128, 1), nn.ReLU(), nn.Conv1d(128, 256, 1))

    def forward(self, sound: Tensor) -> Tensor:
        """Logits of the next sample."""
        x = self.embedding(sound).transpose(1, 2)
        skips = torch.zeros_like(x)
        for layer in self.layers:
            x, skip = layer(x)
            skips = skips + skip
        logits: Tensor = self.head(skips)
        return logits


class TemporalBlock(nn.Module):
    """Two causal convolutions with weight normalisation, as in a TCN."""

    def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.pad = 2 * dilation
        self.first = norm(nn.Conv1d(inputs, outputs, 3, dilation=dilation))
        self.second = norm(nn.Conv1d(outputs, outputs, 3, dilation=dilation))
        self.shortcut = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Residual sum."""
        y = F.dropout(F.relu(self.first(F.pad(x, (self.pad, 0)))), 0.1, self.training)
        y = F.dropout(F.relu(self.second(F.pad(y, (self.pad, 0)))), 0.1, self.training)
        return F.relu(y + self.shortcut(x))


def tcn() -> nn.Module:
    """A temporal convolutional network."""
    blocks = [TemporalBlock(16 if i == 0 else 96, 96, 2**i) for i in range(5)]
    return nn.Sequential(*blocks, nn.Conv1d(96, 8, 1))


def next_token(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross entropy of the next token, over a (batch, time) tensor of ids."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def next_sample(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross entropy of the next sample, classes in the second dimension."""
    return F.cross_entropy(model(batch[:, :-1]), batch[:, 1:])


def labelled(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy over the last dimension of the logits."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error."""
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


def ctc(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """CTC loss with every input and target at full length."""
    features, targets = batch
    log_probabilities = model(features)
    time, size = log_probabilities.shape[:2]
    return F.ctc_loss(log_probabilities, targets, (time,) * size, (targets.shape[1],) * size)


add("lstm_language_model", "recurrent", LanguageModel, lambda: torch.randint(VOCABULARY, (8, 65)), next_token)
add(
    "gru_classifier",
    "recurrent",
    TextClassifier,
    lambda: (torch.randint(VOCABULARY, (8, 96)), torch.randint(4, (8,))),
    labelled,
)
add(
    "rnn_forecaster",
    "recurrent",
    SeriesForecaster,
    lambda: (torch.randn(128, 16, 64), torch.randn(128, 16, 64)),
    squared,
)
add(
    "lstm_cell_tagger",
    "recurrent",
    CellTagger,
    lambda: (torch.randint(VOCABULARY, (16, 64)), torch.randint(64, (16, 64))),
    labelled,
)
add("ctc_speech", "speech", SpeechRecogniser, lambda: (torch.randn(4, 80, 400), torch.randint(1, 29, (4, 40))), ctc)
add("wavenet", "speech", WaveNet, lambda: torch.randint(256, (4, 1025)), next_sample)
add("tcn", "sequence", tcn, lambda: (torch.randn(8, 16, 600), torch.randn(8, 8, 600)), squared)
