"""Hugging Face's folders of weights: what of them is which tensor of ours."""
