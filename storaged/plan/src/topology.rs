//! Shapes between the wire and the plans.

use storaged_wire::shape::EncodeShape;

use crate::{Order, Shape};

/// More turns than this are not taken from a leader: a turn is a class of stripes, which is written down. The wire has
/// the same bound.
const ROOTS_MAX: usize = 255;

/// The shape that a leader said; the plain chain if it said none; none at all if it is out of bounds.
pub fn from_wire(said: Option<&EncodeShape>, sources: usize) -> Option<Shape> {
    let numbers = |list: &[u32]| {
        list.iter()
            .map(|number| *number as usize)
            .collect::<Vec<_>>()
    };
    let order = |list: &[u32]| match list.len() {
        0 => Some(Order::Rotating),
        length if length == sources => Some(Order::Fixed(numbers(list))),
        _ => None,
    };
    Some(match said {
        None => Shape::Chain {
            order: Order::Fixed((0..sources).collect()),
        },
        Some(EncodeShape::Chain { order: list }) => Shape::Chain {
            order: order(list)?,
        },
        Some(EncodeShape::Tree {
            fan_in,
            order: list,
        }) => Shape::Tree {
            fan_in: *fan_in as usize,
            order: order(list)?,
        },
        Some(EncodeShape::GatherAtSources { roots }) if roots.len() <= ROOTS_MAX => {
            Shape::GatherAtSources {
                roots: numbers(roots),
            }
        }
        Some(EncodeShape::GatherAtSources { .. }) => return None,
        Some(EncodeShape::GatherAtKeepers) => Shape::GatherAtKeepers,
    })
}

/// As a leader says it.
pub fn to_wire(shape: &Shape) -> EncodeShape {
    let numbers = |list: &[usize]| list.iter().map(|number| *number as u32).collect::<Vec<_>>();
    let list = |order: &Order| match order {
        Order::Rotating => Vec::new(),
        Order::Fixed(order) => numbers(order),
    };
    match shape {
        Shape::Chain { order } => EncodeShape::Chain { order: list(order) },
        Shape::Tree { fan_in, order } => EncodeShape::Tree {
            fan_in: *fan_in as u32,
            order: list(order),
        },
        Shape::GatherAtSources { roots } => EncodeShape::GatherAtSources {
            roots: numbers(roots),
        },
        Shape::GatherAtKeepers => EncodeShape::GatherAtKeepers,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_comes_back_as_it_was_said() {
        for shape in [
            Shape::Chain {
                order: Order::Rotating,
            },
            Shape::Chain {
                order: Order::Fixed(vec![2, 0, 1]),
            },
            Shape::Tree {
                fan_in: 3,
                order: Order::Rotating,
            },
            Shape::gather_at_all_sources(3),
            Shape::GatherAtKeepers,
        ] {
            assert_eq!(from_wire(Some(&to_wire(&shape)), 3), Some(shape));
        }
        let order = Order::Fixed(vec![0, 1, 2]);
        assert_eq!(from_wire(None, 3), Some(Shape::Chain { order }));
    }

    #[test]
    fn a_shape_out_of_bounds_is_none() {
        let long = EncodeShape::Chain { order: vec![0; 4] };
        assert_eq!(from_wire(Some(&long), 3), None);
        let many = EncodeShape::GatherAtSources {
            roots: vec![0; ROOTS_MAX + 1],
        };
        assert_eq!(from_wire(Some(&many), 3), None);
    }
}
