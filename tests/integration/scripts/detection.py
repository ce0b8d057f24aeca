"""A small one-stage detector: images with varying numbers of boxes, matching by overlap, suppression in evaluation."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=2)
parser.add_argument("--image-size", type=int, default=64)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--max-boxes", type=int, default=5)
parser.add_argument("--images", type=int, default=8)
parser.add_argument("--epochs", type=int, default=1)

STRIDE = 8


class Boxes(Dataset):
    def __init__(self, size, image_size, max_boxes):
        self.size, self.image_size, self.max_boxes = size, image_size, max_boxes

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.rand(3, self.image_size, self.image_size, generator=generator)
        count = int(torch.randint(0, self.max_boxes + 1, (1,), generator=generator))
        corner = torch.rand(count, 2, generator=generator) * self.image_size * 0.6
        extent = (0.1 + 0.3 * torch.rand(count, 2, generator=generator)) * self.image_size
        labels = torch.randint(1, 4, (count,), generator=generator)
        return image, {"boxes": torch.cat([corner, corner + extent], dim=1), "labels": labels, "image_id": index}


def collate(batch):
    return tuple(zip(*batch, strict=True))


def box_area(boxes):
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def box_iou(a, b):
    lt = torch.max(a[:, None, :2], b[:, :2])
    rb = torch.min(a[:, None, 2:], b[:, 2:])
    inter = (rb - lt).clamp(min=0).prod(dim=2)
    return inter / (box_area(a)[:, None] + box_area(b) - inter)


def suppress(boxes, scores, threshold=0.5):
    order, keep = scores.argsort(descending=True), []
    while order.numel() > 0:
        best = order[0]
        keep.append(best.item())
        if order.numel() == 1 or len(keep) >= 20:
            break
        overlap = box_iou(boxes[best][None], boxes[order[1:]])[0]
        order = order[1:][overlap <= threshold]
    return torch.tensor(keep, dtype=torch.long, device=boxes.device)


class Detector(nn.Module):
    def __init__(self, width, num_classes=4):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(2 * width, 4 * width, 3, 2, 1),
            nn.ReLU(),
        )
        self.cls = nn.Conv2d(4 * width, num_classes, 3, padding=1)
        self.reg = nn.Conv2d(4 * width, 4, 3, padding=1)
        self.num_classes = num_classes

    def forward(self, images, targets=None):
        x = torch.stack(list(images))
        features = self.backbone(x)
        logits = self.cls(features).flatten(2).transpose(1, 2)
        deltas = self.reg(features).flatten(2).transpose(1, 2)
        anchors = self.anchors(features)
        if self.training:
            return self.losses(logits, deltas, anchors, targets)
        return self.detect(logits, deltas, anchors)

    def anchors(self, features):
        h, w = features.shape[-2:]
        ys, xs = torch.meshgrid(
            torch.arange(h, device=features.device), torch.arange(w, device=features.device), indexing="ij"
        )
        centres = torch.stack([xs, ys], dim=-1).view(-1, 2) * STRIDE + STRIDE / 2
        return torch.cat([centres - 2 * STRIDE, centres + 2 * STRIDE], dim=1).float()

    def losses(self, logits, deltas, anchors, targets):
        class_losses, box_losses = [], []
        for logit, delta, target in zip(logits, deltas, targets, strict=True):
            labels = torch.zeros(len(anchors), dtype=torch.long, device=logits.device)
            if len(target["boxes"]) > 0:
                iou = box_iou(anchors, target["boxes"])
                best, matched = iou.max(dim=1)
                positive = best > 0.3
                labels[positive] = target["labels"][matched[positive]]
                wanted = (target["boxes"][matched[positive]] - anchors[positive]) / STRIDE
                box_loss = F.smooth_l1_loss(delta[positive], wanted, reduction="sum")
                box_losses.append(box_loss / max(1, positive.sum().item()))
            class_losses.append(F.cross_entropy(logit, labels))
        zero = deltas.sum() * 0
        return {"cls": torch.stack(class_losses).mean(), "box": sum(box_losses, zero) / max(1, len(box_losses))}

    def detect(self, logits, deltas, anchors, score_threshold=0.05):
        results = []
        for logit, delta in zip(logits, deltas, strict=True):
            scores, labels = logit.softmax(-1)[:, 1:].max(-1)
            kept = scores > score_threshold
            boxes = anchors[kept] + delta[kept] * STRIDE
            chosen = suppress(boxes, scores[kept])
            results.append({"boxes": boxes[chosen], "scores": scores[kept][chosen], "labels": labels[kept][chosen] + 1})
        return results


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dataset = Boxes(args.images, args.image_size, args.max_boxes)
    loader = DataLoader(dataset, args.batch_size, shuffle=True, collate_fn=collate)
    model = Detector(args.width).to(device)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.005, momentum=0.9, weight_decay=0.0005)
    for epoch in range(args.epochs):
        model.train()
        for images, targets in loader:
            images = [image.to(device) for image in images]
            targets = [{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in t.items()} for t in targets]
            loss_dict = model(images, targets)
            losses = sum(loss_dict.values())
            if not torch.isfinite(losses):
                raise SystemExit(f"Loss is {losses.item()}, stopping training")
            optimizer.zero_grad()
            losses.backward()
            optimizer.step()
            print(f"epoch {epoch}: " + ", ".join(f"{name} {value.item():.4f}" for name, value in loss_dict.items()))
        model.eval()
        with torch.no_grad():
            images, targets = next(iter(loader))
            for result, target in zip(model([image.to(device) for image in images]), targets, strict=True):
                result = {k: v.cpu() for k, v in result.items()}
                print(f"image {target['image_id']}: {len(result['boxes'])} found, {len(target['boxes'])} there")


if __name__ == "__main__":
    main()
