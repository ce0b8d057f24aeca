"""Knowledge distillation: a frozen teacher guides a smaller student."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--image-size", type=int, default=32)
parser.add_argument("--teacher-width", type=int, default=32)
parser.add_argument("--student-width", type=int, default=8)
parser.add_argument("--train-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--temperature", type=float, default=2.0)
parser.add_argument("--soft-weight", type=float, default=0.25)
parser.add_argument("--teacher-epochs", type=int, default=0, help="epochs of training the teacher first")


class Net(nn.Module):
    def __init__(self, width, num_classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=2, stride=2),
            nn.Conv2d(2 * width, 2 * width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(8),
        )
        self.classifier = nn.Sequential(
            nn.Linear(2 * width * 64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, num_classes)
        )

    def forward(self, x):
        return self.classifier(torch.flatten(self.features(x), 1))


def distillation_loss(teacher_logits, student_logits, labels, args):
    T = args.temperature
    soft_targets = F.softmax(teacher_logits / T, dim=-1)
    soft_prob = F.log_softmax(student_logits / T, dim=-1)
    soft_loss = torch.sum(soft_targets * (soft_targets.log() - soft_prob)) / soft_prob.size()[0] * (T**2)
    label_loss = F.cross_entropy(student_logits, labels)
    return args.soft_weight * soft_loss + (1 - args.soft_weight) * label_loss


def train(model, train_loader, epochs, device):
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(epochs):
        for inputs, labels in train_loader:
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()


def test(model, test_loader, device):
    model.to(device)
    model.eval()
    correct = 0
    total = 0
    with torch.no_grad():
        for inputs, labels in test_loader:
            inputs, labels = inputs.to(device), labels.to(device)
            outputs = model(inputs)
            _, predicted = torch.max(outputs.data, 1)
            total += labels.size(0)
            correct += (predicted == labels).sum().item()
    return 100 * correct / total


def main():
    args = parser.parse_args()
    torch.manual_seed(42)
    device = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    images = torch.randn(args.train_size, 3, args.image_size, args.image_size)
    loader = DataLoader(TensorDataset(images, torch.arange(args.train_size) % 10), args.batch_size, shuffle=True)
    teacher, student = Net(args.teacher_width).to(device), Net(args.student_width).to(device)
    if args.teacher_epochs:
        train(teacher, loader, args.teacher_epochs, device)
    print(f"Teacher accuracy before: {test(teacher, loader, device):.2f}%")

    optimizer = optim.Adam(student.parameters(), lr=1e-3)
    teacher.eval()
    for epoch in range(args.epochs):
        student.train()
        running_loss = 0.0
        for inputs, labels in loader:
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            with torch.no_grad():
                teacher_logits = teacher(inputs)
            loss = distillation_loss(teacher_logits, student(inputs), labels, args)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        print(f"Epoch {epoch + 1}/{args.epochs}, Loss: {running_loss / len(loader)}")
    print(f"Student accuracy: {test(student, loader, device):.2f}%")


if __name__ == "__main__":
    main()
