from treedec.models import load_target
