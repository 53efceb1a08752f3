"""From text to a trained, exported model: the configuration, the data, the ranks and the loop."""
