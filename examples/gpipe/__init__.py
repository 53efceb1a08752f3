"""GPipe's two model families, and ResNet and ViT, each as a sequence of layers; two scripts train them."""
