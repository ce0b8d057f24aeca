import pytest

from memfit.adapters.torch.value_flow import may_reach

# In each, values are read at lines marked R; what happens at those marked Y may depend on them, at those marked N not.
PROGRAMS = {
    "a loop that shows its loss": """
config = {}
losses = []
for batch in loader:
    loss = model(batch)
    print(loss.item())  # R
    losses.append(loss.item())  # R
    config["missing"]  # N
    loss.backward()  # N
    mean = sum(losses) / len(losses)  # Y
    assert mean < 1  # Y
int("x")  # N
""",
    "what decides": """
count = int(mask.sum().item())  # R
if count == 0:
    kept = []
    raise ValueError("nothing")  # Y
else:
    kept = [1]
kept[0]  # Y
other = {}
other["x"]  # N
for i in range(count):
    other["y"]  # Y
""",
    "a loop that is left": """
ids = []
while True:
    token = head(x)
    if token.item() == end:  # R
        break
    ids.append(1)
ids[-1]  # Y
names[-1]  # N
""",
    "functions, parameters and attributes": """
class Trainer:
    def log(self, step, value):
        self.best = value
        names[step]  # N
    def read(self, x):
        return x.tolist()  # R
    def check(self):
        assert self.best  # Y
class Other:
    def log(self, step, value):
        names[step]  # N
        assert value  # Y
def first(values, value):
    assert value  # N
    return values[0]  # Y
value = 3
trainer.log(step, value=x.item())  # R
first(trainer.read(x), 2)  # Y
values[0]  # N
assert value  # N
""",
    "in the very statement": """
y = table[
    x.item()  # R
]  # Y
with open(path) as file:
    try:
        size = y
    except KeyError:
        rows = size  # Y
        rows[0]  # Y
    data = file.read()
    data[0]  # N
y += 1  # Y
""",
}


def lines(text, mark):
    return [number for number, line in enumerate(text.splitlines(), 1) if line.endswith(f"# {mark}")]


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_value_may_decide(name):
    text = PROGRAMS[name]
    reached = {line for mark in "YN" for line in lines(text, mark) if may_reach(text, lines(text, "R"), [line])}

    assert sorted(reached) == lines(text, "Y")


def test_what_cannot_be_read_may_decide_anything():
    assert may_reach("not python at all", [1], [1])
    assert may_reach("", [1], [1])
    assert may_reach("x = 1", [1], [7])
