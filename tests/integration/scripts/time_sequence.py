"""Sine waves predicted by stacked LSTM cells in double precision, trained by L-BFGS on all data at once."""

import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=6, help="waves")
parser.add_argument("--length", type=int, default=20)
parser.add_argument("--hidden", type=int, default=16)


class Sequence(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.hidden = hidden
        self.lstm1 = nn.LSTMCell(1, hidden)
        self.lstm2 = nn.LSTMCell(hidden, hidden)
        self.linear = nn.Linear(hidden, 1)

    def forward(self, input, future=0):
        outputs = []
        h_t, c_t, h_t2, c_t2 = (
            torch.zeros(input.size(0), self.hidden, dtype=torch.double, device=input.device) for _ in range(4)
        )
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        for _ in range(future):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        return torch.cat(outputs, dim=1)


def main():
    opt = parser.parse_args()
    np.random.seed(0)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = np.arange(opt.length) + np.random.randint(-40, 40, opt.batch_size).reshape(opt.batch_size, 1)
    data = np.sin(x / 10.0).astype("float64")
    input, target = torch.from_numpy(data[1:, :-1]).to(device), torch.from_numpy(data[1:, 1:]).to(device)
    test_input, test_target = torch.from_numpy(data[:1, :-1]).to(device), torch.from_numpy(data[:1, 1:]).to(device)
    seq = Sequence(opt.hidden)
    seq.double().to(device)
    criterion = nn.MSELoss()
    optimizer = optim.LBFGS(seq.parameters(), lr=0.8, max_iter=4, line_search_fn="strong_wolfe")
    for i in range(opt.steps):
        print("STEP: ", i)

        def closure():
            optimizer.zero_grad()
            out = seq(input)
            loss = criterion(out, target)
            print("loss:", loss.item())
            loss.backward()
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            pred = seq(test_input, future=10)
            loss = criterion(pred[:, :-10], test_target)
            print("test loss:", loss.item())
            y = pred.detach().cpu().numpy()
            print("extremes:", y.min(), y.max())


if __name__ == "__main__":
    main()
