"""The defaults of each task, as --help of train.py shows them. Derived: see derive_keys.py."""

TASK_DEFAULTS = """\
  Digits: task_architecture=CNN batch_size=16 num_epochs=40 learning_rate=0.02
    lr_schedule_milestones=[[30.0,0.1]] momentum=0.9 weight_decay=0.0001 gradient_clipping=null
  FashionMNIST: task_architecture=CNN batch_size=32 num_epochs=5 learning_rate=0.05
    lr_schedule_milestones=[[4.0,0.1]] momentum=0.9 weight_decay=0.0001 gradient_clipping=null
  Cifar: task_architecture=ResNet18 batch_size=128 num_epochs=300 learning_rate=0.1
    lr_schedule_milestones=[[150.0,0.1],[250.0,0.1]] momentum=0.9 weight_decay=0.0001
    gradient_clipping=null
  Cifar100: task_architecture=ResNet18 batch_size=128 num_epochs=300 learning_rate=0.1
    lr_schedule_milestones=[[150.0,0.1],[250.0,0.1]] momentum=0.9 weight_decay=0.0001
    gradient_clipping=null
  ImageNet: task_architecture=ResNet50 batch_size=32 num_epochs=90 learning_rate=0.0125
    lr_schedule_milestones=[[30.0,0.1],[60.0,0.1],[80.0,0.1]] momentum=0.9 weight_decay=0.0001
    gradient_clipping=null
  LSTM: task_architecture=LSTM batch_size=8 num_epochs=10 learning_rate=10.0
    lr_schedule_milestones=[[8.0,0.1]] momentum=0.0 weight_decay=0.0 gradient_clipping=0.4
  Text: task_architecture=GPT batch_size=8 num_epochs=1 learning_rate=0.1 lr_schedule_milestones=[]
    momentum=0.9 weight_decay=0.0 gradient_clipping=1.0
"""
