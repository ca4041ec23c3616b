"""The memory that a layer of experts on two ranks takes in a step, beside other layers."""
