PICTURES = ()


def joined(p, r):
    return r


def page(a, b):
    return ""
