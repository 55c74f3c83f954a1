"""Decentralized deep learning with compressed communication."""
